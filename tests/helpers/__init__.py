"""What tests share: tiny models, folders, the command line, corpora."""
