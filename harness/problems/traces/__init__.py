"""Data: small copies of public request traces. See README.md beside this file for sources and licences."""
