#!lua
-- How each script of this room begins: the clock, and the memory that a tenant's entries take together.
--
-- KEYS  1 entry  2 its pieces  3 the tenant's entries  4 their sizes
-- ARGV  1 clock offset in ms (0 but in tests)  2 scope  3 owner; what follows is each script's own

-- Negate by subtracting from 0: -0 would become "-0", which is no integer to Redis.
local function text(number)
  return string.format('%.0f', number)
end

local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000) + tonumber(ARGV[1])
local scope, me = ARGV[2], ARGV[3]
local ENTRY_BYTES = 512 -- what Redis needs for an entry without pieces, about

local function uncount(member)
  local bytes = tonumber(redis.call('HGET', KEYS[4], member) or '0')
  redis.call('HINCRBY', KEYS[4], 'total', text(0 - bytes))
  redis.call('HDEL', KEYS[4], member)
  redis.call('ZREM', KEYS[3], member)
end

-- The entry has so many bytes and, unless it is touched again, is gone in life ms.
local function count(bytes, life)
  local before = tonumber(redis.call('HGET', KEYS[4], scope) or '0')
  redis.call('HINCRBY', KEYS[4], 'total', text(bytes - before))
  redis.call('HSET', KEYS[4], scope, text(bytes))
  redis.call('ZADD', KEYS[3], text(now + life), scope)
  redis.call('PEXPIRE', KEYS[1], text(life))
  redis.call('PEXPIRE', KEYS[2], text(life))
  for index = 3, 4 do
    if redis.call('PTTL', KEYS[index]) < life then
      redis.call('PEXPIRE', KEYS[index], text(life))
    end
  end
end

local function drop()
  redis.call('DEL', KEYS[1], KEYS[2])
  uncount(scope)
end

local function uncount_what_is_gone()
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', text(now), 'LIMIT', 0, 100)) do
    uncount(member)
  end
end
