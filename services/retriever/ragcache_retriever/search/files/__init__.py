"""What an index stores: vectors and the files of a base."""
