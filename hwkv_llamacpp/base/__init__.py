"""Small things that every room needs: files written whole or not at all, sizes, names, types of options."""
