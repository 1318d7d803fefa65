"""Program that runs third-party scorers and gyms; it imports only the standard library and them."""
