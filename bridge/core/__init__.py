"""Values, errors, output directories, local and remote files, file formats."""
