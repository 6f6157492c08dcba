"""Gymnasium environments for robots, with scripted experts."""
