"""What runs beside the trainer, shipped as one zipapp: standard library, libtmux and the pure packages."""
