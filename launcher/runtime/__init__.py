"""What runs on the ranks. Only here, and in the runtime halves of plugins, is torch imported."""
