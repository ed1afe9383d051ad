-- Bring a log to its tenant's retention, in bounded steps: trim, count what is not counted, and let what is kept expire
-- by the retention that holds now.
--
-- KEYS  3 the tenants that have a log
-- ARGV  3 retention, ms  4 most bytes  5 how much later keys expire by themselves, ms  6 most entries a step  7 tenant
--       8 where to go on with expiries, or ''
-- Replies
--   entries trimmed, whether to call again (1 or 0), where to go on with expiries

local keep, most_bytes, slack, most = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])

local gone, more = trim(keep, most_bytes, most)
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('SREM', KEYS[3], ARGV[7])
  return { gone, 0, '' }
end

local from = redis.call('HGET', KEYS[2], 'from')
if from then
  local older = redis.call('XREVRANGE', KEYS[1], '(' .. from, '-', 'COUNT', most)
  for _, entry in ipairs(older) do
    count(tonumber(redis.call('HGET', hash_of(field(entry, 'r')), 'n') or field(entry, 'n')))
  end
  if #older < most then
    redis.call('HDEL', KEYS[2], 'from')
  else
    redis.call('HSET', KEYS[2], 'from', older[#older][1])
  end
  more = true
end

local going_on = ''
if redis.call('HGET', KEYS[2], 'keep') ~= text(keep) then
  local entries = redis.call('XRANGE', KEYS[1], ARGV[8] == '' and '-' or '(' .. ARGV[8], '+', 'COUNT', most)
  for _, entry in ipairs(entries) do
    redis.call('PEXPIREAT', hash_of(field(entry, 'r')), text(place(entry[1]) + keep + slack))
  end
  if #entries == most then
    going_on = entries[#entries][1]
    more = true
  else
    redis.call('HSET', KEYS[2], 'keep', text(keep))
    local newest = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
    local expires = text(place(newest[1]) + keep + slack)
    redis.call('PEXPIREAT', KEYS[1], expires)
    redis.call('PEXPIREAT', KEYS[2], expires)
  end
end
return { gone, more and 1 or 0, going_on }
