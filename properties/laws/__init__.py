"""Laws: what a law is, and the laws and checks that several books share."""
