"""Helpers that every room may import: errors, files, JSON, text, command lines. Imports no other room and no torch."""
