"""Words and phrases that ask for the same thing: our own short table, of pairs that hold in nearly every question.

A group is one meaning; its first word is the one all others are read as. Left out on purpose: near-synonyms that
someone may
ask for the one or the other of (reset and restart, treatment and cure, city and town). A word of several meanings does
no harm where nobody would set it against the others of its group.
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
capital city = capital
take care of = care for
takes care of = care for
taking care of = caring for
solar energy = solar power
nuclear energy = nuclear power
wind energy = wind power
gas station = petrol station
movie theater = cinema
movie theatre = cinema
world war i = world war 1
take out = remove
take off = remove
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
quick fast rapid swift
quickest fastest
quicker faster
repair fix mend solve resolve
advantage benefit upside pro merit
disadvantage drawback downside con
begin start commence
buy purchase
cheap inexpensive affordable
expensive costly pricey
big large
bigger larger
biggest largest
small little
best top
tallest highest
easiest simplest
easier simpler
simple easy
reduce lessen decrease shrink lower cut minimize diminish
increase raise
improve enhance boost
baby infant newborn
film movie
build construct
job career occupation profession
choose pick select
happen occur
hard difficult tough challenging
quit stop cease exit
kid child
car automobile
doctor physician
author writer write
help assist aid
answer reply respond response
use utilize employ
need require necessary
obtain acquire get receive
allow permit
forbid prohibit
create make produce generate
calm soothe
method way technique approach manner
important essential crucial vital
main major primary principal chief key
common typical usual
famous well-known renowned
mistake error
problem issue trouble
smart intelligent clever
stupid dumb
flu influenza
image photo picture photograph
television tv
phone telephone smartphone
computer pc
laptop notebook
fridge refrigerator
exam examination test
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
apartment flat
house home
shop store
subway metro underground
highway motorway freeway
cab taxi
elevator lift
found establish
finish complete end conclude
enormous huge gigantic
rich wealthy
lawyer attorney
teacher instructor
student pupil
friend buddy pal
coworker colleague
beginner novice newbie
illness disease sickness
sick ill
nation country
goal objective aim target
result outcome
cost price
reason cause
effect impact consequence influence
difference differ distinguish distinction different
similarity alike similar
compare comparison
ingredient constituent
location place spot
center centre middle
trip journey
speak talk
see view
change alter modify update
find locate
search lookup
show display
check verify cheque
execute run
setup configure
connect link
split separate
reserve book
learn study
attempt try
keep maintain
notify inform
clean wash
cook prepare
work operate
understand comprehend grasp
remember recall
remain stay
leave depart
reach arrive
hire recruit
dismiss fire
defeat beat
rule govern
contain include
symptom sign
remedy cure
treatment treat
medicine medication drug
expert specialist
skill ability
fee charge
warranty guarantee
shipping delivery
company firm business corporation
website site
customer client
salary wage pay
income earnings
homework assignment
subject topic
step stage phase
type kind sort category
amount quantity
example instance
story tale
video clip
password passcode
invent devise
collect gather
translate translation
summary summarize synopsis recap
calculate compute
evaluate assess
recommend suggest
advice tip
idea suggestion
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
strange odd weird
odor smell
flavor taste flavour
jewelry jewellery
pajamas pyjamas
skeptic sceptic
mold mould
plow plough
live dwell reside
visit tour
tasty delicious
frightening scary
afraid scared
senior elderly
handle cope
peak summit
annual yearly
area region
conversation chat
clothes clothing apparel garment
gift present
meal dish
dinner supper
beverage drink
exercise workout
attraction sight
risk danger hazard
dangerous hazardous risky
safe secure
healthy nutritious
interesting fascinating
boring dull
beautiful pretty gorgeous
funny humorous hilarious
happy glad
sad unhappy
angry mad
nervous anxious
loud noisy
quiet silent
thin slim skinny
modern contemporary
correct proper accurate
wrong incorrect
genuine real authentic
feature characteristic trait attribute
immediately instantly
often frequently
sometimes occasionally
almost nearly
maybe perhaps
enough sufficient
now currently
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
prevent avoid avert
teenager teen adolescent
toddler tot
universe cosmos
rain rainfall
donut doughnut
yogurt yoghurt""".splitlines()
)
