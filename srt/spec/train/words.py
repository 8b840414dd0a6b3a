"""Words that fill the slots of the prompt templates in `srt.spec.train.bank`."""

from __future__ import annotations


def _split(text: str) -> tuple[str, ...]:
    """Entries are separated by commas or line ends."""
    return tuple(
        part.strip() for line in text.splitlines() for part in line.split(",") if part.strip()
    )


TOPICS = _split("""
volcanoes, the water cycle, honey bees, black holes, the Roman Empire, jazz music, chess, coffee
tea, sourdough bread, electric cars, the human heart, photosynthesis, the stock market
inflation, vaccines, the Great Wall of China, ancient Egypt, the French Revolution
the Silk Road, the Moon landing, Mars, coral reefs, whales, penguins, owls, wolves, dinosaurs
fossils, earthquakes, hurricanes, glaciers, climate change, solar power, wind turbines
nuclear energy, batteries, computers, the internet, robots, machine learning, cryptography
databases, operating systems, open source software, video games, photography, painting
the Renaissance, Shakespeare, poetry, haiku, opera, ballet, the piano, the violin, gardening
compost, tomatoes, houseplants, dogs, cats, goldfish, horses, hiking, camping, cycling, swimming
marathon running, yoga, meditation, sleep, nutrition, vitamins, protein, sugar, olive oil
public transport, bridges, skyscrapers, tunnels, lighthouses, castles, libraries, museums
schools, remote work, time management, job interviews, public speaking, negotiation, teamwork
leadership, budgeting, saving money, mortgages, taxes, insurance, small businesses, marketing
customer service, the immune system, DNA, evolution, cells, bacteria, viruses, antibiotics
allergies, the brain, memory, languages, grammar, translation, writing systems
the printing press, newspapers, radio, cinema, democracy, constitutions, elections, human rights
the United Nations, trade, migration, cities, oceans, rivers, deserts, rainforests, mountains
islands, the Arctic, tides, clouds, rainbows, lightning, gravity, magnetism, light, sound, atoms
chemistry, the periodic table, acids, metals, glass, paper, friendship, kindness, patience
honesty, courage, stress, motivation, habits, hobbies, travel, festivals, chocolate, cheese
rice, noodles, soup, salads, spices, breakfast, picnics, restaurants, knitting, pottery
""")

NAMES = _split("""
Amara, Ben, Chloe, Diego, Elena, Farid, Grace, Hiro, Ines, Jonas, Kavya, Liam, Mei, Noor, Oscar
Priya, Quentin, Rosa, Samir, Tara, Umar, Vera, Wanjiru, Xavier, Yara, Zoe, Anton, Beatriz, Cheng
Dalia, Emre, Fiona, Goran, Hana, Ivan, Julia, Kofi, Leila, Marco, Nadia, Olu, Paula, Rafael
Sofia, Tom, Ursula
""")

PLACES = _split("""
Lisbon, Kyoto, Nairobi, Toronto, Oslo, Buenos Aires, Hanoi, Cairo, Prague, Seattle, Sydney
Athens, Istanbul, Vienna, Dublin, Marrakesh, Seoul, Lima, Helsinki, Mumbai, Edinburgh, Havana
Warsaw, Rome, a small fishing village, a mountain town, a desert outpost, an island, a farm
a busy harbour, a space station, an old library, a railway station, a forest cabin, a castle
a night market
""")

JOBS = _split("""
baker, nurse, teacher, carpenter, pilot, farmer, librarian, detective, gardener, engineer
sailor, painter, clockmaker, postman, doctor, chef, musician, tailor, astronaut, fisherman
programmer, electrician, shepherd, beekeeper, potter, journalist, bus driver, lighthouse keeper
violin maker, geologist
""")

CREATURES = _split("""
fox, owl, turtle, dragon, cat, crow, bear, rabbit, whale, mouse, wolf, robot, ghost, giant
hedgehog, parrot, donkey, spider, firefly, goat, penguin, elephant, frog, squirrel, seagull
horse
""")

THINGS = _split("""
map, key, lantern, letter, clock, violin, mirror, compass, coin, umbrella, notebook, ring
telescope, kite, bicycle, photograph, music box, teapot, seed, painting, door, boat, radio
scarf, bell, mask
""")

MOODS = _split("""
funny, sad, mysterious, hopeful, scary, gentle, exciting, strange, cheerful, thoughtful, heroic
quiet
""")

LANGUAGES = _split("""
French, Spanish, German, Italian, Portuguese, Dutch, Swedish, Polish, Latin, Russian, Japanese
Chinese, Korean, Turkish, Greek, Hindi, Arabic, Danish, Norwegian, Finnish, Czech, Romanian
""")

EVERYDAY = _split(
    """
the weather is lovely today; where is the nearest train station; I would like a cup of coffee
could you help me carry this box; the meeting starts at nine; my sister works in a hospital
we are going to the beach this weekend; how much does this shirt cost; I lost my keys yesterday
the soup is too salty; please close the window; he reads a book every month; I have two brothers
the museum is closed on Mondays; they moved to a new house; can I pay by card
the dog is sleeping; she plays the guitar very well; we need more milk and bread
turn left at the traffic lights; my flight was delayed by three hours
the children are playing in the garden; I forgot my umbrella; this road leads to the old bridge
it has been raining since morning; do you have a table for four
the teacher explained the lesson twice; I am learning to cook; what time does the shop open
happy birthday and best wishes; the computer is not working; I will call you tomorrow evening
""".replace(";", ",")
)

PROGRAMMING = _split("""
Python, Python, Python, Python, JavaScript, JavaScript, Java, C, C++, Go, Rust, TypeScript, Ruby
SQL, Bash, PHP, C#, Kotlin
""")

CODE_TASKS = _split(
    """
reverses a string; checks whether a number is prime; computes the factorial of n
merges two sorted lists; counts the words in a text; finds the largest element of a list
removes duplicates from a list; checks whether a string is a palindrome
computes the nth Fibonacci number; sorts a list of numbers; performs a binary search
flattens a nested list; converts Celsius to Fahrenheit; sums the digits of a number
finds the greatest common divisor of two numbers; counts the vowels in a string
reads a file line by line; writes a list to a file; groups words by their first letter
computes the average of a list; transposes a matrix; multiplies two matrices
generates a random password; validates an email address; parses a date
rotates a list by k places; finds the second largest number
checks whether two strings are anagrams; converts a number to binary; implements a stack
implements a queue; implements a linked list; implements a simple bank account
implements bubble sort; implements quicksort; implements merge sort
finds the longest word in a sentence; capitalises every word
counts how often each character occurs; computes compound interest; checks for balanced brackets
finds all pairs that add up to a target; returns the intersection of two lists
computes the median; converts a list of pairs to a dictionary; prints a multiplication table
draws a triangle of stars; simulates rolling two dice; downloads a web page
retries a function three times; caches results of a function; splits a list into chunks
filters even numbers; finds the shortest path in a graph; traverses a binary tree
inserts into a binary search tree; computes the distance between two points
finds missing numbers in a range; converts roman numerals
""".replace(";", ",")
)

CONCEPTS = _split("""
recursion, a hash table, a pointer, a closure, inheritance, a decorator, an exception, a thread
a mutex, an API, a linked list, a stack, a queue, big O notation, a binary tree
a lambda function, a loop, a variable, a regular expression, version control, unit testing
a database index, caching, garbage collection
""")

GOODS = _split("""
apples, pencils, books, tickets, marbles, cookies, oranges, notebooks, stamps, eggs, flowers
chairs, bottles, shirts, candles, bricks, coins, cards, cupcakes, toys
""")

RECORDS = _split(
    """
a customer with name age and city; a book with title author and year
a recipe with name and ingredients; a movie with title director and rating
a product with id name and price; a weather report with city and temperature
an event with title date and place; an employee with name position and salary
a song with title artist and length; a flight with number origin and destination
a student with name grades and average; a car with make model and year
a restaurant with name cuisine and address; a country with name capital and population
a pet with name species and age; a task with title due date and status
a hotel with name stars and rooms; an order with items and total
""".replace(";", ",")
)
