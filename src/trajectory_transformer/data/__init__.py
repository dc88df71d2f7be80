"""Episodes, and the files and libraries that they are loaded from."""
