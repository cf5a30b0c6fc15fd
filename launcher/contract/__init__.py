"""What launcher, ranks and plugins share: data, and the interfaces of plugins. Nothing that plans or runs."""
