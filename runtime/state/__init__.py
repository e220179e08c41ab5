"""Values that several ranks have, compared and sent."""
