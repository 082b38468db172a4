"""Studies drawn: numbers from study/, pictures by figures/, and the folders that hold both."""
