"""Makes ``suite_commands`` importable in the folders below."""
