"""What all books share: lines, numbers, lengths, widths, options, illegal inputs and how cases shrink."""
