"""Two protocols in one file each, as a package of their own."""
