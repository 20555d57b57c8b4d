"""The paths of the server, a module for each kind of thing."""
