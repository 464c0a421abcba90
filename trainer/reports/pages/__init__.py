"""What every HTML page is made with: one file each, no network, no server; light and dark, wide and narrow.

page.py puts a page together; page.css and page.js are inside each of them.
"""
