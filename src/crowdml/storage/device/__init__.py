"""The store of a device: one SQLite file, its tables in the numbered .sql files beside this."""
