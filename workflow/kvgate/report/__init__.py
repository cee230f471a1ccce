"""What a person takes away: the table, the pages, the bundles."""
