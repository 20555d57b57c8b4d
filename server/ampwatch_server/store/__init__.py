"""How runs lie in the database, and how they are read from it."""
