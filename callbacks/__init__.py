"""Lightning callbacks; they may use any room, and no room uses them."""
