"""What an attacker tries, on real processes.

Each module names one way in. Its tests fail on a platform without the protection.
"""
