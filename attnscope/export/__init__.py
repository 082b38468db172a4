"""An observation as a folder: tables, figures and a manifest; and a folder of a run, drawn again."""
