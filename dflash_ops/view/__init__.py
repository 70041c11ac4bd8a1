"""Rich renderables of contracts; they know nothing of where these came from."""
