"""What every room of the lab uses: tables, pages, figures, stores, timing, progress, options."""
