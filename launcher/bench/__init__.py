"""What links, devices and disks really do, measured."""
