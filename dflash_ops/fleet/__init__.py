"""Many jobs and hosts at once; the streams that watch them."""
