"""LightningCLI configurations, shipped as package data."""
