-- All that is counted for one tenant, in one step.
--
-- KEYS  1 tenant  2 live  3 epoch  4 usage stream
-- ARGV  1 clock offset in ms  2 prefix of the shard's keys
-- Reply: now, epoch or '', settlements, id of the stream's last entry, budgets, windows, slots, requests. Each is a list:
--   budgets   counter, start, end, spent, reserved, limit's id
--   windows   counter, what the last 60 buckets and the running one hold, limit's id, 1 if it was built from the ledger
--             (else it counts since the limit is known here); but those that are to be built anew
--   slots     counter, list of id, end of the lease, id, end of the lease...; limit's id for which all holders were
--             counted, or ''; the tenant's own first, as `c::tenant:`
--   requests  id, state, by, admitted, bound, tokens, charged, used, end user, project, key, route
--
-- The keys of requests are made here from the prefix; they bear the shard's hash tag like those in KEYS.

local tenant, now = KEYS[1], time(ARGV[1])
local budgets, windows, slots, requests = {}, {}, {}, {}
local epoch = redis.call('GET', KEYS[3])
local live = redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES')
slots[1] = { 'c::tenant:', live, '' }
for at = 1, #live, 2 do
  local held = redis.call('HMGET', ARGV[2] .. 'request:' .. live[at], 'state', 'by', 'admitted', 'bound', 'tokens',
    'charged', 'used', 'user', 'who')
  local who = listed(held[9])
  local row = { live[at] }
  for field = 1, 8 do
    row[#row + 1] = held[field] or ''
  end
  for field = 1, 3 do
    row[#row + 1] = who[field] or ''
  end
  requests[#requests + 1] = row
end
for _, counter in ipairs(redis.call('ZRANGE', tenant .. ':counters', 0, -1)) do
  local key = tenant .. ':' .. counter
  local kind, window = parts(counter)
  if redis.call('EXISTS', key) == 0 then
    redis.call('ZREM', tenant .. ':counters', counter)
  elseif kind == 'b' then
    budgets[#budgets + 1] = { counter, unpack(redis.call('HMGET', key, 'start', 'end', 'spent', 'reserved', 'limit')) }
  elseif kind == 'c' then
    local name = counter:sub(1, 8) == 'c::each:' and 'c::each:' or counter
    local counted = redis.call('HGET', tenant, name) or ''
    slots[#slots + 1] = { counter, redis.call('ZRANGE', key, 0, -1, 'WITHSCORES'), counted }
  else
    local first, sum, fields = math.floor(now / WIDTH[window]) - BUCKETS, 0, {}
    local held = redis.call('HGETALL', key)
    for at = 1, #held, 2 do
      local bucket = tonumber(held[at])
      fields[held[at]] = held[at + 1]
      if bucket and bucket >= first then
        sum = sum + tonumber(held[at + 1])
      end
    end
    local old = epoch and now - tonumber(epoch) >= (BUCKETS + 1) * WIDTH[window]
    if fields['limit'] and epoch and (fields['epoch'] == epoch or old) then
      windows[#windows + 1] = { counter, text(sum), fields['limit'], fields['epoch'] == epoch and 1 or 0 }
    end
  end
end
local last = '0-0'
if redis.call('EXISTS', KEYS[4]) == 1 then
  local about = redis.call('XINFO', 'STREAM', KEYS[4])
  for at = 1, #about, 2 do
    if about[at] == 'last-generated-id' then
      last = about[at + 1]
    end
  end
end
local settlements = redis.call('HGET', tenant, 'settlements') or '0'
return { now, epoch or '', tonumber(settlements), last, budgets, windows, slots, requests }
