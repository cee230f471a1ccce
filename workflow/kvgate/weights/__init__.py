"""Weight preparations. A module a preparation; its hooks are described in plain.py."""
