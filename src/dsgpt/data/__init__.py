"""Token files as training reads them: format, order of the windows, loader."""
