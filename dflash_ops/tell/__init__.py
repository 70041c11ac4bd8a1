"""What people are told: incidents, notifications, the watch from outside."""
