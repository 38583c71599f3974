"""The check: cases are drawn, put to workers, decided, shrunk and explained."""
