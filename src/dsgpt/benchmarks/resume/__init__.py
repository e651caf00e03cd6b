"""Every strategy resumes from the checkpoint of every other."""
