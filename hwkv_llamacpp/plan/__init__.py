"""What a server will take, before it is started."""
