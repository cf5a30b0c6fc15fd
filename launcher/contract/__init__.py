"""What launcher, ranks and plugins share: settings, records, interfaces of plugins. Plans and runs nothing."""
