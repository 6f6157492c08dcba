"""GR00T N1.5: a vision-language backbone and a flow-matching action head for many robots."""
