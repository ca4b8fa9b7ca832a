"""Ordinary calls of actor methods, as both ends know them."""
