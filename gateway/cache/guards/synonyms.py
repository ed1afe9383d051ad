"""Words and phrases that ask for the same thing: our own short table, of pairs that hold in nearly every question.

A group is one meaning; its first word is the one all others are read as. Left out on purpose: near-synonyms between
which answers differ (reset and change a password, hurt and kill, city and town).
"""

from __future__ import annotations

from typing import Final

PHRASES: Final[dict[str, str]] = {
    line.split(" = ")[0]: line.split(" = ")[1]
    for line in """\
united states of america = usa
united states = usa
the us = usa
the u s = usa
u s = usa
united kingdom = uk
great britain = britain
european union = eu
united nations = un
new york city = nyc
artificial intelligence = ai
machine learning = ml
java script = javascript
node js = nodejs
world war two = world war 2
world war one = world war 1
second world war = world war 2
first world war = world war 1
the great war = world war 1
wi fi = wifi
e mail = email
web site = website
web page = webpage
air plane = airplane
cell phone = phone
cellphone = phone
mobile phone = phone
smart phone = smartphone
driving licence = driver license
driving license = driver license
drivers license = driver license
driver s license = driver license
get rid of = remove
gets rid of = removes
getting rid of = removing
stand for = abbreviate
stands for = abbreviate
short for = abbreviate
abbreviation for = abbreviate
take place = happen
took place = happened
takes place = happens
come up with = invent
find out = find
look for = find
search for = find
set up = setup
what s = what is
sign up = register
log in = login
sign in = login
log out = logout
sign out = logout
carry out = perform
figure out = find
work out = workout
give up = quit
make sure = ensure
turn into = convert to
turns into = converts to
change into = convert to
transform into = convert to
a lot of = many
lots of = many
plenty of = many
a number of = many
prior to = before
in front of = before
as well as = and
together with = with
along with = with
by means of = with
with the help of = with
with the use of = with
in order to = to
so as to = to
due to = because of
owing to = because of
in spite of = despite
bring up = raise
pros and cons = advantages and disadvantages
pluses and minuses = advantages and disadvantages
benefits and drawbacks = advantages and disadvantages
good and bad sides = advantages and disadvantages
in addition to = and
on earth = in the world
in existence = in the world
of all time = ever
in history = ever
birth date = birthday
date of birth = birthday
birth place = birthplace
place of birth = birthplace
time zone = timezone
data base = database
main character = protagonist
ice cream = icecream
made up of = made of
composed of = made of
consist of = made of
consists of = made of
made from = made of
in simple terms = simple
in simple words = simple
in plain english = simple
in plain language = simple
in layman s terms = simple
in lay terms = simple
in a simple way = simple
in an easy way = simple
in short = brief
in brief = brief
in a few words = brief
in detail = detail
in depth = detail
bullet points = bullet
bullet point = bullet
bulleted list = bullet
step by step = stepwise
able to = can
need to = must
needs to = must
have to = must
has to = must
going to = will
used to be = formerly
do people = do we
do humans = do we
what kind of = which type of
what kinds of = which type of
what sort of = which type of
what sorts of = which type of
what type of = which type of
what types of = which type of
look like = resemble
make money = earn money
best selling = bestseller
heart attack = infarction
high blood pressure = hypertension
low blood pressure = hypotension
ww 2 = world war 2
ww 1 = world war 1
wwii = world war 2
wwi = world war 1
a few = some
resize = change size of
ok = okay
alright = okay
all right = okay
come from = originate
comes from = originates
came from = originated
each day = daily
per day = daily
each week = weekly
per week = weekly
per month = monthly
each month = monthly
per year = yearly
each year = yearly
calm down = calm
life expectancy = lifespan
check if = check whether
see if = see whether
know if = know whether
tell if = tell whether
determine if = determine whether
test if = test whether
verify if = verify whether
find if = find whether
full form of = abbreviate
full form = abbreviate
get better at = improve
improve at = improve
switch on = turn on
switch off = turn off
shut off = turn off
deal with = handle
cope with = handle
in the solar system = in our solar system
each other = eachother
one another = eachother
as a beginner = for a beginner
for beginners = for a beginner
in a nutshell = brief
every day = daily
every week = weekly
every month = monthly
every year = yearly""".splitlines()
}

GROUPS: Final[tuple[tuple[str, ...], ...]] = tuple(
    tuple(line.split())
    for line in """\
delete remove erase eliminate
quick fast rapid
quickest fastest
quicker faster
repair fix mend
advantage benefit upside
disadvantage drawback downside
begin start commence
buy purchase
cheap inexpensive affordable
big large
bigger larger
biggest largest
reduce lessen decrease shrink
baby infant newborn
film movie
build construct
job career occupation profession
choose pick select
happen occur
hard difficult
quit stop cease
kid child
car automobile
doctor physician
author writer write
help assist
answer reply
use utilize
need require necessary
obtain acquire get
allow permit
forbid prohibit
create make produce
calm soothe
improve enhance boost
method technique approach
important essential crucial vital
common typical
famous well-known renowned
mistake error
smart intelligent clever
flu influenza
image photo picture photograph
television tv
phone telephone
fridge refrigerator
exam examination
ad advert advertisement
maths math mathematics
lab laboratory
info information
app application
bike bicycle
airplane plane aeroplane aircraft
petrol gasoline
vacation holiday
cv resume
trash rubbish garbage
eggplant aubergine
zucchini courgette
cilantro coriander
diaper nappy
truck lorry
faucet tap
couch sofa
luggage baggage
found establish
finish complete
enormous huge gigantic
rich wealthy
lawyer attorney
teacher instructor
coworker colleague
illness disease
nation country
goal objective
result outcome
cost price
reason cause
effect impact consequence
difference differ distinguish distinction different
similarity alike similar
ingredient constituent
location place
trip journey
speak talk
invent devise
collect gather
alter modify
translate translation
summary summarize synopsis recap
calculate compute
evaluate assess
recommend suggest
advice tip
medicine medication
program programme
color colour
gray grey
tire tyre
defense defence
license licence
offense offence
aluminum aluminium
mother mom mum
father dad
grandmother grandma
grandfather grandpa
belly stomach tummy
undo revert
folder directory
javascript js
typescript ts
python py
database db
repository repo
documentation docs
config configuration
kubernetes k8s
postgres postgresql
salary wage pay
company firm
website site
customer client
marriage wedding
odd strange weird
odor smell
flavor taste flavour
jewelry jewellery
check cheque
pajamas pyjamas
skeptic sceptic
mold mould
plow plough
treatment treat
main major primary principal chief
tasty delicious
frightening scary
senior elderly
understand comprehend
handle cope
income earnings
peak summit
annual yearly
area region
conversation chat
clothes clothing apparel garment
risk danger hazard
feature characteristic trait attribute
immediately instantly
mandatory compulsory obligatory
pain ache
poisonous toxic
reliable dependable trustworthy
requirement prerequisite
close shut
suitable appropriate
terrible awful
whole entire
strategy tactic
global worldwide
prevent avert
teenager teen adolescent
toddler tot
cab taxi
donut doughnut
yogurt yoghurt
live dwell reside
visit tour
painter paint
composer compose
birth born""".splitlines()
)
