"""What launcher, ranks and plugins share: settings, records, interfaces of plugins. Runs nothing itself."""
