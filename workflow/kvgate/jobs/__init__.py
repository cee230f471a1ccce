"""What every job is made of: its key, its record, its files held by sha256, the store. Standard library and numpy."""
