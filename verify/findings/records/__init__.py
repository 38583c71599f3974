"""The record of a check, from which other machines and pages read what it found."""
