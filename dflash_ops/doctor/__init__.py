"""What a machine still needs: checks of this machine and of a job's host, each with its next step."""
