"""The folder of features that nvdlfw-inspect's own engine loads."""
