#!lua
-- Raise the generation of a tenant's configuration: admissions with an older one are answered STALE.
--
-- KEYS  1 tenant
-- ARGV  1 generation  2 life of an idle tenant's counters, ms

local known = redis.call('HGET', KEYS[1], 'generation')
if not known or tonumber(known) < tonumber(ARGV[1]) then
  redis.call('HSET', KEYS[1], 'generation', ARGV[1])
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
