"""`closecall explain`: one page that shows what a prompt's attention kept, dropped, and nearly kept."""
