"""Routes for whoever runs the server: they exist only behind an admin key, or at a socket of their own."""
