"""What every other room may use: errors, files, JSON, the command line. Imports neither torch nor another room."""
