"""Demonstrations recorded from scripted experts."""
