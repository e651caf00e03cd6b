"""Helpers that every room may import: errors, files, JSON, command line. Imports neither torch nor any other room."""
